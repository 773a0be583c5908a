"""Texts and weights that the recipes use: fetched with the system's own clients, extracted, counted and cached."""
