"""What every room needs: errors that users read, files, several processes."""
