# Finds LibTorch (a wheel's torch folder or an unpacked libtorch) without probing for a CUDA toolkit.
#
# Input:   TESSERA_LIBTORCH   the folder that holds include/ and lib/; default: the wheel in the source tree's .venv
# Output:  LibTorch::cpu      torch_cpu + c10
#          LibTorch::cuda     torch_cuda + c10_cuda (only where the LibTorch has them)
#          LibTorch_VERSION
if(NOT TESSERA_LIBTORCH)
  file(GLOB _wheels "${CMAKE_CURRENT_LIST_DIR}/../.venv/lib/python3*/site-packages/torch")
  if(_wheels) # otherwise nothing is cached, so that the next run finds what scripts/setup has installed by then
    list(GET _wheels 0 _wheel)
    get_filename_component(_wheel "${_wheel}" ABSOLUTE)
    set(TESSERA_LIBTORCH "${_wheel}" CACHE PATH "Folder with LibTorch's include/ and lib/" FORCE)
  endif()
else() # RPATHs and the installed package need it absolute; as a PATH it is read from the folder where cmake was started
  if(DEFINED CACHE{TESSERA_LIBTORCH})
    set(TESSERA_LIBTORCH "" CACHE PATH "Folder with LibTorch's include/ and lib/")
  endif()
  get_filename_component(TESSERA_LIBTORCH "${TESSERA_LIBTORCH}" ABSOLUTE)
endif()

find_path(LibTorch_INCLUDE_DIR torch/csrc/api/include/torch/torch.h
  PATHS "${TESSERA_LIBTORCH}/include" NO_DEFAULT_PATH NO_CACHE)
foreach(_library torch_cpu c10 torch_cuda c10_cuda)
  find_library(LibTorch_${_library} ${_library} PATHS "${TESSERA_LIBTORCH}/lib" NO_DEFAULT_PATH NO_CACHE)
endforeach()
foreach(_header torch/headeronly/version.h torch/csrc/api/include/torch/version.h)
  if(LibTorch_INCLUDE_DIR AND NOT LibTorch_VERSION AND EXISTS "${LibTorch_INCLUDE_DIR}/${_header}")
    file(STRINGS "${LibTorch_INCLUDE_DIR}/${_header}" _version REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) [0-9]+")
    string(REGEX REPLACE "[^0-9;]" "" _version "${_version}")
    list(JOIN _version "." LibTorch_VERSION)
  endif()
endforeach()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(LibTorch
  REQUIRED_VARS LibTorch_INCLUDE_DIR LibTorch_torch_cpu LibTorch_c10 VERSION_VAR LibTorch_VERSION
  REASON_FAILURE_MESSAGE "set TESSERA_LIBTORCH to a folder with include/ and lib/, or run scripts/setup")

if(LibTorch_FOUND AND NOT TARGET LibTorch::cpu)
  add_library(LibTorch::c10 SHARED IMPORTED)
  set_target_properties(LibTorch::c10 PROPERTIES IMPORTED_LOCATION "${LibTorch_c10}")
  target_include_directories(LibTorch::c10 SYSTEM INTERFACE
    "${LibTorch_INCLUDE_DIR}" "${LibTorch_INCLUDE_DIR}/torch/csrc/api/include")
  target_compile_definitions(LibTorch::c10 INTERFACE USE_C10D USE_C10D_GLOO USE_DISTRIBUTED USE_RPC USE_TENSORPIPE FMT_HEADER_ONLY=1)

  add_library(LibTorch::cpu SHARED IMPORTED)
  set_target_properties(LibTorch::cpu PROPERTIES IMPORTED_LOCATION "${LibTorch_torch_cpu}")
  target_link_libraries(LibTorch::cpu INTERFACE LibTorch::c10)

  if(LibTorch_torch_cuda AND LibTorch_c10_cuda)
    add_library(LibTorch::cuda SHARED IMPORTED)
    set_target_properties(LibTorch::cuda PROPERTIES IMPORTED_LOCATION "${LibTorch_torch_cuda}")
    target_link_libraries(LibTorch::cuda INTERFACE "${LibTorch_c10_cuda}" LibTorch::cpu)
  endif()
endif()
