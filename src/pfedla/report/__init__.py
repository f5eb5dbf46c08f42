"""Figures, tables and pages. They read run folders only and never import torch."""
