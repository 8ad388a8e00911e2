"""Rollout engines: what generates tokens. `base.py` is the contract, one file per back end."""
