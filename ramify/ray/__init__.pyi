from ramify.maps.ray_asker import Asker as Asker
