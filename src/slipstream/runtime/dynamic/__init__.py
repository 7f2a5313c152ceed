"""Work handed out as processes become free: the order of items, the queue in the store, the journal of what is done."""
