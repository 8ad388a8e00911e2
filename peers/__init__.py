"""How messages travel: transports, discovery, signed calls and announcements, chunk exchange. Knows nothing of RL."""
