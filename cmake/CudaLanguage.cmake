# Turns on CMake's CUDA language for csrc/kernels/cuda/*.cu with the nvcc that Cuda.cmake found.
set(CMAKE_CUDA_COMPILER "${QUARTZ_NVCC}")
set(CMAKE_CUDA_ARCHITECTURES "${QUARTZ_CUDA_ARCHITECTURES}")
set(CMAKE_CUDA_RUNTIME_LIBRARY None) # linked by path, see Cuda.cmake
# No contraction of a * b + c: fused operations are written as such, so that host and CUDA round alike.
set(CMAKE_CUDA_FLAGS_RELEASE "-O3 -DNDEBUG -fmad=false")
if(QUARTZ_CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
  set(CMAKE_CUDA_COMPILER_LAUNCHER "${QUARTZ_CCACHE}")
endif()
enable_language(CUDA)

# CMake 3.25 (Debian 12) does not know that nvcc has C++20.
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
