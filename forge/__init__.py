"""forge: every training optimisation is one option of one config group."""

__version__ = "0.1.0"
