"""The processes of a node and the channel between them."""
