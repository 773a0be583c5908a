"""Recipes: ready-made jobs described by one flat file."""
