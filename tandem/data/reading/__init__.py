"""Files, folders and names of data sets, to rows."""
