"""The node process: roles, weights, children, state. Trio throughout; torch never enters it."""
