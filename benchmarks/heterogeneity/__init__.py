"""The iso-FLOP sweep: one model against experts; beside it the settings of the ladders of the recipe."""
