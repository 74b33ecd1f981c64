"""The loop: recipes as dataflow graphs, where everything is placed, and the trainer that runs them."""
