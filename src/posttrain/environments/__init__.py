"""What answers a model between its turns: environments, tools, how calls are read and run. No models here."""
