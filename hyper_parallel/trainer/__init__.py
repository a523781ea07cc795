"""The run: processes, clocks, files and logs around a model that it knows only through the adapter protocol."""
