"""A node of a peer-to-peer swarm that post-trains language models with reinforcement learning."""

__version__ = "0.1.0"
