# The public names, read when the package is imported: from HOME import NAME as NAME
from ramify.maps.ray_data_stage import RayDataAsker as RayDataAsker
