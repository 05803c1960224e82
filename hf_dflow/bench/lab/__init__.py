"""A small pair trained from scratch in minutes: where drafters converge and every comparison has several seeds."""
