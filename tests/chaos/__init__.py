"""Three clusters train over a bad wide area while everything that can break does."""
