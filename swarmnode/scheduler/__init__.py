"""How many rollouts to buy, from whom, and who may generate how many now. Pure: no clock, no I/O."""
