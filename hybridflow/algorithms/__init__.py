"""The mathematics: pure functions on tensors. Imports torch alone; nothing here prints, logs or reads settings."""
