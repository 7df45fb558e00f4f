"""Many ranks: the process group, models split over it, and what ranks send each other."""
