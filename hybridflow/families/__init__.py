"""Which models there are: the settings of one, and one table for each family of Hugging Face. Torch-free."""
