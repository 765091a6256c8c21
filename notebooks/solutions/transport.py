"""Solutions of the exercises in 11_transport."""


def layout(sizes, inline):
    places, used = [], 0
    for size in sizes:
        if size <= inline:
            places.append(None)
            continue
        begin = -(-used // 64) * 64
        places.append(begin)
        used = begin + size
    return places


def take(slabs, size):
    for number, (state, visible, has) in enumerate(slabs):
        if state == 0 and not visible and has >= size:  # 0: FREE
            return number
    return None


def first_image(batch):
    return batch["image"][0].clone()
