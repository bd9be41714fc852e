# Finds the Python interpreter (-DPython_EXECUTABLE=..., else python3) and the torch installed for it.
# Sets QUARTZ_PYTHON_*, QUARTZ_TORCH_* and QUARTZ_CUDA_PACKAGE_*: the names printed by torch_info.py.
# Defines the interface target quartz_torch: torch's headers (as system headers) and libraries, nothing of Python.

if(NOT Python_EXECUTABLE)
  find_program(Python_EXECUTABLE NAMES python3 python REQUIRED)
endif()

# Warnings of torch's import (no NumPy, no GPU) go to stderr and are shown only when the import fails.
execute_process(
  COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/torch_info.py"
  OUTPUT_VARIABLE _info
  ERROR_VARIABLE _error
  RESULT_VARIABLE _result)
if(NOT _result EQUAL 0)
  message(FATAL_ERROR "${Python_EXECUTABLE} cannot import torch, which torch-quartz is built against:\n${_error}")
endif()
# A value may itself be a list; split at line ends only.
string(REPLACE ";" "\\;" _info "${_info}")
string(REPLACE "\n" ";" _lines "${_info}")
foreach(_line IN LISTS _lines)
  if(_line MATCHES "^([A-Z0-9_]+)=(.*)$")
    set(_name "${CMAKE_MATCH_1}")
    set(QUARTZ_${_name} "${CMAKE_MATCH_2}")
  endif()
endforeach()

if(QUARTZ_TORCH_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "torch-quartz needs torch 2.11 or newer; ${Python_EXECUTABLE} has ${QUARTZ_TORCH_VERSION}")
endif()

add_library(quartz_torch INTERFACE)
target_include_directories(quartz_torch SYSTEM INTERFACE ${QUARTZ_TORCH_INCLUDE_DIRS})
target_compile_definitions(quartz_torch INTERFACE _GLIBCXX_USE_CXX11_ABI=${QUARTZ_TORCH_CXX11_ABI})
# Nothing in libtorch_cpu may be dropped: its static registrations (kernels, dispatch keys) are used by no symbol name.
target_link_options(quartz_torch INTERFACE "-Wl,--no-as-needed")
target_link_libraries(
  quartz_torch INTERFACE "${QUARTZ_TORCH_LIB_DIR}/libtorch.so" "${QUARTZ_TORCH_LIB_DIR}/libtorch_cpu.so"
                         "${QUARTZ_TORCH_LIB_DIR}/libc10.so")
