"""What composes with every loss: weights and masks for stale tokens, narrower clips, penalties."""
