"""What every part is built on: contracts (read first), rounds, layers, tasks, training."""
