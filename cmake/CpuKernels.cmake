# The CPU kernels of csrc/kernels/cpu, compiled once for each instruction set; csrc/kernels/isa.h chooses at run time.
# Sets QUARTZ_CPU_KERNELS, the object libraries. AVX2 comes first: of inline functions that both emit, the linker keeps
# the first copy, which must run everywhere.
file(GLOB _cpu_kernels CONFIGURE_DEPENDS csrc/kernels/cpu/*.cpp)
# Loops over random words become vectors only if errno and the flags of floating-point exceptions do not matter, which
# nobody reads; values do not change.
set_source_files_properties(
  csrc/kernels/cpu/random_fill.cpp csrc/kernels/cpu/dropout.cpp csrc/kernels/cpu/multinomial.cpp
  PROPERTIES COMPILE_OPTIONS "-fno-math-errno;-fno-trapping-math")
set(_avx2_flags -mavx2 -mfma -mf16c)
set(_avx512_flags ${_avx2_flags} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mprefer-vector-width=512)
set(QUARTZ_CPU_KERNELS)
foreach(_isa IN ITEMS avx2 avx512)
  add_library(quartz_kernels_${_isa} OBJECT ${_cpu_kernels})
  target_include_directories(quartz_kernels_${_isa} PRIVATE csrc)
  target_compile_definitions(quartz_kernels_${_isa} PRIVATE QUARTZ_ISA=cpu_${_isa})
  # The order and the rounding of every sum are what the source says: no contraction, no reassociation. The warnings that
  # are off come from inside GCC 12's own AVX-512 header.
  target_compile_options(quartz_kernels_${_isa} PRIVATE -O3 -ffp-contract=off -Wno-maybe-uninitialized -Wno-uninitialized ${_${_isa}_flags})
  target_link_libraries(quartz_kernels_${_isa} PRIVATE quartz_flags)
  list(APPEND QUARTZ_CPU_KERNELS quartz_kernels_${_isa})
endforeach()

# PyTorch's thread pool is OpenMP's, used through inline functions: aten/parallel.cpp needs the compiler's support and
# the runtime that libtorch_cpu itself has loaded.
find_library(QUARTZ_OPENMP NAMES libgomp.so.1 PATHS "${QUARTZ_TORCH_LIB_DIR}" NO_DEFAULT_PATH NO_CACHE)
if(NOT QUARTZ_OPENMP)
  set(QUARTZ_OPENMP gomp)
endif()
set_source_files_properties(csrc/aten/parallel.cpp PROPERTIES COMPILE_OPTIONS -fopenmp)
target_link_libraries(quartz_objects PUBLIC "${QUARTZ_OPENMP}")
