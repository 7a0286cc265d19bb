"""What a run of any command needs: options, models and images, folder, progress, publishing."""
