"""Between text and actions: chat template to prompt ids within a budget, response ids to `Action`."""
