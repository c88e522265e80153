"""Records on disk: SQLite, metrics, trackers, checkpoint folders, manifests and locks."""
