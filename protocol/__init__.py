"""What travels between nodes and what it must satisfy: pure rules, no I/O, no clock, no torch, no libp2p."""
