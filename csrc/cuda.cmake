# Makes padam_cuda, the CUDA kernel, if PADAM_CUDA is ON; an error where it cannot be built.
#
# PADAM_CUDA_ARCHS: compute capabilities as in "80;90"; those that the compiler does not know are
# left out. The oldest and the newest are also stored as PTX, which the driver compiles for GPUs in
# between and beyond.
option(PADAM_CUDA "Build the CUDA kernel" OFF)
set(PADAM_CUDA_ARCHS "80;90;100;120" CACHE STRING "Compute capabilities to compile for")

set(summary "native CPU module")
if(PADAM_CUDA)
  set(CMAKE_CUDA_ARCHITECTURES OFF)  # until it is known what the compiler knows
  # Linked in whole, so that the module can be imported where there is no driver.
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  enable_language(CUDA)
  execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --list-gpu-arch
    OUTPUT_VARIABLE known OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[0-9]+" known "${known}")
  set(archs "")
  foreach(arch IN LISTS PADAM_CUDA_ARCHS)
    if(arch IN_LIST known)
      list(APPEND archs ${arch})
    else()
      message(STATUS "padam_ext: this CUDA compiler does not know sm_${arch}, which is left out")
    endif()
  endforeach()
  if(NOT archs)
    list(JOIN known ", " known)
    message(FATAL_ERROR "padam_ext: this CUDA compiler knows none of PADAM_EXT_CUDA_ARCHS "
      "(${PADAM_CUDA_ARCHS}); it knows ${known}")
  endif()
  list(REMOVE_DUPLICATES archs)
  list(SORT archs COMPARE NATURAL)
  list(TRANSFORM archs APPEND "-real" OUTPUT_VARIABLE CMAKE_CUDA_ARCHITECTURES)
  list(GET archs 0 oldest)
  list(GET archs -1 newest)
  list(APPEND CMAKE_CUDA_ARCHITECTURES ${oldest}-virtual ${newest}-virtual)
  list(REMOVE_DUPLICATES CMAKE_CUDA_ARCHITECTURES)

  set(CMAKE_CUDA_STANDARD 17)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
  add_library(padam_cuda OBJECT padam_cuda.cu)
  target_compile_options(padam_cuda PRIVATE -fmad=false)
  list(TRANSFORM archs PREPEND "sm_")
  list(JOIN archs " " archs)
  target_compile_definitions(padam_cuda PRIVATE PADAM_CUDA_ARCHS="${archs}")
  set(summary "native CPU and CUDA module, by nvcc ${CMAKE_CUDA_COMPILER_VERSION} for ${archs}")
endif()
file(WRITE ${CMAKE_BINARY_DIR}/summary.txt "${summary}")
