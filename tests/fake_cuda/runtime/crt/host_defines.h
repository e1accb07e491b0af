// What the headers of the CUDA runtime need of the compiler's own headers, which come with nvcc and not with torch.

#pragma once

#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __host__
#define __device__
#define __cudart_builtin__
#define __device_builtin__
#define __device_builtin_surface_type__
#define __device_builtin_texture_type__
#define __align__(nbytes) __attribute__((aligned(nbytes)))
#define __builtin_align__(nbytes) __align__(nbytes)
