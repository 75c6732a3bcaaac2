"""Files and folders: written whole or not at all, and text read from them document by document."""
