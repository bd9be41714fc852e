# Decides whether the CUDA half is built: QUARTZ_WITH_CUDA, with the reason in QUARTZ_CUDA_REASON.
# On: torch is a CUDA build, nvcc is found and the environment does not say TORCH_QUARTZ_CUDA=0.
# Defines the interface target quartz_cuda (headers, torch_cuda, c10_cuda, cudart) when on.

set(QUARTZ_CUDA_ARCHITECTURES "90a" CACHE STRING "CUDA architectures of the kernels, as CMAKE_CUDA_ARCHITECTURES")

find_program(
  QUARTZ_NVCC nvcc NO_CACHE
  HINTS ENV CUDA_HOME ENV CUDA_PATH /usr/local/cuda
  PATH_SUFFIXES bin)

set(QUARTZ_WITH_CUDA OFF)
if("$ENV{TORCH_QUARTZ_CUDA}" STREQUAL "0")
  set(QUARTZ_CUDA_REASON "TORCH_QUARTZ_CUDA=0")
elseif(NOT QUARTZ_TORCH_CUDA_VERSION)
  set(QUARTZ_CUDA_REASON "torch ${QUARTZ_TORCH_VERSION} is not a CUDA build")
elseif(NOT QUARTZ_NVCC)
  set(QUARTZ_CUDA_REASON "no nvcc in PATH, CUDA_HOME or /usr/local/cuda")
else()
  set(QUARTZ_WITH_CUDA ON)
  set(QUARTZ_CUDA_REASON "torch ${QUARTZ_TORCH_VERSION} and ${QUARTZ_NVCC}")
endif()
if("$ENV{TORCH_QUARTZ_CUDA}" STREQUAL "1" AND NOT QUARTZ_WITH_CUDA)
  message(FATAL_ERROR "TORCH_QUARTZ_CUDA=1 asks for the CUDA half, but ${QUARTZ_CUDA_REASON}")
endif()

if(QUARTZ_WITH_CUDA)
  # nvcc may be a wrapper script or a link; it knows its own toolkit ("#$ TOP=..." in the dry run).
  execute_process(
    COMMAND "${QUARTZ_NVCC}" --dryrun -x cu -E /dev/null
    OUTPUT_VARIABLE _dryrun
    ERROR_VARIABLE _dryrun_error
    RESULT_VARIABLE _result)
  if("${_dryrun}${_dryrun_error}" MATCHES "#\\$ TOP=([^\n]+)")
    string(STRIP "${CMAKE_MATCH_1}" QUARTZ_CUDA_TOOLKIT)
    get_filename_component(QUARTZ_CUDA_TOOLKIT "${QUARTZ_CUDA_TOOLKIT}" REALPATH)
  else()
    message(FATAL_ERROR "${QUARTZ_NVCC} --dryrun does not work (${_result}):\n${_dryrun}${_dryrun_error}")
  endif()

  # The toolkit may be the compiler alone; then the libraries' headers and cudart are those of NVIDIA's pip packages
  # that torch itself runs on.
  set(_cuda_include)
  foreach(_dir IN ITEMS "${QUARTZ_CUDA_TOOLKIT}/include" "${QUARTZ_CUDA_TOOLKIT}/targets/x86_64-linux/include")
    if(EXISTS "${_dir}/cuda_runtime_api.h")
      list(APPEND _cuda_include "${_dir}")
      break()
    endif()
  endforeach()
  list(APPEND _cuda_include ${QUARTZ_CUDA_PACKAGE_INCLUDE_DIRS})

  string(REGEX MATCH "^[0-9]+" _cuda_major "${QUARTZ_TORCH_CUDA_VERSION}")
  find_library(
    QUARTZ_CUDART
    NAMES "libcudart.so.${_cuda_major}" cudart
    PATHS ${QUARTZ_CUDA_PACKAGE_LIB_DIRS} "${QUARTZ_TORCH_LIB_DIR}" "${QUARTZ_CUDA_TOOLKIT}/lib64"
          "${QUARTZ_CUDA_TOOLKIT}/targets/x86_64-linux/lib"
    NO_DEFAULT_PATH NO_CACHE REQUIRED)

  add_library(quartz_cuda INTERFACE)
  target_include_directories(quartz_cuda SYSTEM INTERFACE ${_cuda_include})
  target_compile_definitions(quartz_cuda INTERFACE QUARTZ_WITH_CUDA=1)
  target_link_libraries(
    quartz_cuda INTERFACE "${QUARTZ_TORCH_LIB_DIR}/libtorch_cuda.so" "${QUARTZ_TORCH_LIB_DIR}/libc10_cuda.so"
                          "${QUARTZ_CUDART}")
  # libtorch_cuda finds its own dependencies by its own rpath at load; the linker need not look for them.
  target_link_options(quartz_cuda INTERFACE "-Wl,--allow-shlib-undefined")
endif()
