"""Starting ranks: the launchers and the recipes that come with the package. Torch-free: it runs on a login node."""
