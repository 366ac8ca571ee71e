"""When it pays to mix experts: regimes, controls, and the questions that were asked beforehand."""
