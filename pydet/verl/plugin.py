"""verl's entry point: it imports this module, and calls nothing of it."""

from pydet.verl import register

register()
