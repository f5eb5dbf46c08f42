"""The paper's tables and figures: the runs that each is made of, and what came out."""
