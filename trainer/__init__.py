"""What is learned: losses, advantages, the replay buffer, the learner and the versions that it publishes."""
