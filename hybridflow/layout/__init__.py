"""How a model is split over ranks, and where the ranks lie. No torch."""
