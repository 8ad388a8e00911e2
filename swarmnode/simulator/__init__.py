"""Discrete events on virtual time around the node's own pure decisions: what a fleet or swarm would do, and
cost."""
