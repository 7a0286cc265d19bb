"""Attribution methods: maps of the contribution of each patch or pixel to a class."""
