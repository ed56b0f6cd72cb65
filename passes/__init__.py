"""Graph to graph: lifetimes, prices, rewriting, replay. Knows neither torch nor a solver."""
