"""The iso-FLOP sweep: one model against experts; beside it the files of the ladders of the recipe."""
