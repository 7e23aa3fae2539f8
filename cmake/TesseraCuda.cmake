# Decides whether the NCCL side is built. It needs no toolkit and no device: the wheel of PyTorch brings the headers and libraries.
#
# Input:   TESSERA_CUDA          AUTO (where LibTorch has CUDA, and the headers of CUDA and NCCL are found), ON (an error where not) or OFF
# Output:  TESSERA_WITH_CUDA     true: LibTorch::cuda and NCCL::nccl exist. Link both only into libtessera_nccl, never into tessera.
#          CUDA_RUNTIME_INCLUDE_DIR   the folder of cuda_runtime_api.h. Not cached: another LibTorch has others.
set(TESSERA_CUDA AUTO CACHE STRING "Build the NCCL side: AUTO, ON or OFF")
set_property(CACHE TESSERA_CUDA PROPERTY STRINGS AUTO ON OFF)

# The headers of the CUDA that LibTorch was built with come before those of a toolkit, which may have another version.
function(tessera_find_cuda_headers)
  get_filename_component(site_packages "${TESSERA_LIBTORCH}" DIRECTORY)
  file(GLOB wheels "${site_packages}/nvidia/cu[0-9]*/include" "${site_packages}/nvidia/cuda_runtime/include")
  find_package(CUDAToolkit QUIET)
  find_path(CUDA_RUNTIME_INCLUDE_DIR cuda_runtime_api.h HINTS ${wheels} ${CUDAToolkit_INCLUDE_DIRS} NO_DEFAULT_PATH NO_CACHE)
  find_path(CUDA_RUNTIME_INCLUDE_DIR cuda_runtime_api.h NO_CACHE)
  set(CUDA_RUNTIME_INCLUDE_DIR "${CUDA_RUNTIME_INCLUDE_DIR}" PARENT_SCOPE)
endfunction()

set(TESSERA_WITH_CUDA OFF)
if(TESSERA_CUDA)
  if(TARGET LibTorch::cuda)
    tessera_find_cuda_headers()
    find_package(NCCL QUIET)
  endif()
  if(TARGET LibTorch::cuda AND CUDA_RUNTIME_INCLUDE_DIR AND NCCL_FOUND)
    set(TESSERA_WITH_CUDA ON)
    # The wheel's NCCL headers come first: a toolkit's folder may hold others.
    target_link_libraries(LibTorch::cuda INTERFACE NCCL::nccl)
    target_include_directories(LibTorch::cuda SYSTEM INTERFACE "${CUDA_RUNTIME_INCLUDE_DIR}")
    target_compile_definitions(LibTorch::cuda INTERFACE USE_C10D_NCCL)
    message(STATUS "NCCL side: on (CUDA headers in ${CUDA_RUNTIME_INCLUDE_DIR}, NCCL ${NCCL_VERSION})")
  elseif(TESSERA_CUDA STREQUAL AUTO)
    message(STATUS "NCCL side: off (no CUDA in LibTorch, or no headers of CUDA or NCCL)")
  else()
    message(FATAL_ERROR "TESSERA_CUDA=ON needs a LibTorch with CUDA (found: '${LibTorch_torch_cuda}'), the headers of CUDA (found: "
      "'${CUDA_RUNTIME_INCLUDE_DIR}') and NCCL (found: '${NCCL_LIBRARY}'); the Linux wheels of PyTorch bring all three")
  endif()
endif()
