import cvcuda

import userstream as us

images = cvcuda.Tensor((1, 480, 640, 3), cvcuda.Type.U8, "NHWC")
mirrored = cvcuda.flip(images, flipCode=1)

with us.borrow(mirrored) as stream:  # after the last operator that used them
    assert us.get_stream(mirrored) is stream
with us.borrow(mirrored, activate=True):
    turned = cvcuda.flip(mirrored, flipCode=0)  # on the user stream

assert us.asnumpy(turned).shape == (1, 480, 640, 3)
