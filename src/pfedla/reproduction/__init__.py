"""The paper's tables and figures: which runs each is made of, playing those that are missing, and what came out."""
