# Decides whether the NCCL side is built.
#
# Input:   TESSERA_CUDA        AUTO (where a toolkit, LibTorch's CUDA libraries and NCCL are found), ON (an error where not) or OFF
# Output:  TESSERA_WITH_CUDA   true: LibTorch::cuda and NCCL::nccl exist. Link both only into libtessera_nccl, never into tessera.
set(TESSERA_CUDA AUTO CACHE STRING "Build the NCCL side: AUTO, ON or OFF")
set_property(CACHE TESSERA_CUDA PROPERTY STRINGS AUTO ON OFF)

set(TESSERA_WITH_CUDA OFF)
if(TESSERA_CUDA)
  find_package(CUDAToolkit QUIET)
  if(LibTorch_torch_cuda)
    find_package(NCCL QUIET)
  endif()
  if(CUDAToolkit_FOUND AND TARGET LibTorch::cuda AND NCCL_FOUND)
    set(TESSERA_WITH_CUDA ON)
    # The wheel's NCCL headers come first: a toolkit's folder may hold others.
    target_link_libraries(LibTorch::cuda INTERFACE NCCL::nccl)
    target_include_directories(LibTorch::cuda SYSTEM INTERFACE ${CUDAToolkit_INCLUDE_DIRS})
    target_compile_definitions(LibTorch::cuda INTERFACE USE_C10D_NCCL)
    message(STATUS "NCCL side: on (CUDA ${CUDAToolkit_VERSION}, NCCL ${NCCL_VERSION})")
  elseif(TESSERA_CUDA STREQUAL AUTO)
    message(STATUS "NCCL side: off (no CUDA toolkit, or no CUDA in LibTorch)")
  else()
    message(FATAL_ERROR "TESSERA_CUDA=ON needs a CUDA toolkit (found: '${CUDAToolkit_VERSION}'), a LibTorch with CUDA "
      "(found: '${LibTorch_torch_cuda}') and NCCL (found: '${NCCL_LIBRARY}')")
  endif()
endif()
