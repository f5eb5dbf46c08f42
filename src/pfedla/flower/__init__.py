"""Clients behind Flower: the only place that imports flwr (the extra `pfedla[flower]`)."""
