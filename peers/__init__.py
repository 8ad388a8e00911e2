"""How messages travel: transports, discovery, signed calls, announcements, chunk exchange. Knows no RL."""
