# Configures the source tree TESSERA, and the project EMBEDDING that has it as a part, below WORK, with empty files in place
# of LibTorch's.
file(REMOVE_RECURSE "${WORK}")

# make_wheel(folder file...): a virtual environment in WORK with PyTorch's wheel, and these files more.
function(make_wheel folder)
  set(packages lib/python3/site-packages)
  foreach(file torch/include/torch/csrc/api/include/torch/torch.h nvidia/cuda_runtime/include/cuda_runtime_api.h
      nvidia/nccl/include/nccl.h nvidia/nccl/lib/libnccl.so.2 torch/lib/libtorch_cpu.so torch/lib/libc10.so
      torch/lib/libtorch_cuda.so torch/lib/libc10_cuda.so torch/lib/libtorch_python.so)
    file(WRITE "${WORK}/${folder}/${packages}/${file}" "")
  endforeach()
endfunction()

# configure(source build argument...): sets `output`.
function(configure source build)
  execute_process(COMMAND "${CMAKE_COMMAND}" -G Ninja -S "${source}" -B "${WORK}/${build}" ${ARGN} WORKING_DIRECTORY "${WORK}"
    OUTPUT_VARIABLE output ERROR_VARIABLE output RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "configuring ${source} with ${ARGN} ended with ${status}:\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

function(expect text)
  string(FIND "${output}" "${text}" found)
  if(found EQUAL -1)
    message(FATAL_ERROR "no '${text}' in:\n${output}")
  endif()
endfunction()

make_wheel(first)
make_wheel(second)
file(MAKE_DIRECTORY "${WORK}/first/bin")
file(CREATE_LINK "${PYTHON}" "${WORK}/first/bin/python" SYMBOLIC)
set(libraries "${WORK}/embedding/tessera/lib")

# A folder that is given relative to the current one is that one later as well. The libraries lie side by side.
configure("${EMBEDDING}" embedding -D "TESSERA=${TESSERA}" -D TESSERA_LIBTORCH=first/lib/python3/site-packages/torch)
expect("CUDA headers in ${WORK}/first/")
expect("tessera: in ${libraries}, RPATH $ORIGIN;${WORK}/first/lib/python3/site-packages/torch/lib")
expect("tessera_nccl: in ${libraries}, RPATH $ORIGIN;${WORK}/first/lib/python3/site-packages/torch/lib")
file(STRINGS "${WORK}/embedding/tessera/cmake/tesseraConfig.cmake" output REGEX "set\\(TESSERA_LIBTORCH")
expect("\"${WORK}/first/lib/python3/site-packages/torch\"")

# Nothing is kept of what was found beside another LibTorch.
configure("${EMBEDDING}" embedding -D "TESSERA_LIBTORCH=${WORK}/second/lib/python3/site-packages/torch")
expect("CUDA headers in ${WORK}/second/")
expect("No Python extension: ${WORK}/second/lib/python3/site-packages/torch is not in a virtual environment")

# Every program is built with CUDA's side, which it loads.
configure("${TESSERA}" whole -D TESSERA_LIBTORCH=first/lib/python3/site-packages/torch)
foreach(output_of bin/getting_started tests/libtessera_test_base.a) # which every test program links
  file(STRINGS "${WORK}/whole/build.ninja" output REGEX "^build ${output_of}: ")
  expect(" lib/libtessera_nccl.so")
endforeach()

# The exported target looks for the headers where they are installed.
configure("${TESSERA}" whole -D CMAKE_INSTALL_INCLUDEDIR=include/elsewhere)
file(STRINGS "${WORK}/whole/cmake_install.cmake" output REGEX "/tessera\\.h\"")
expect("/include/elsewhere/tessera\" ")
file(GLOB_RECURSE exported "${WORK}/whole/CMakeFiles/Export/*/tesseraTargets.cmake")
file(STRINGS "${exported}" output REGEX "INTERFACE_INCLUDE_DIRECTORIES")
expect("\"\${_IMPORT_PREFIX}/include/elsewhere\"")

# Without CUDA its side of an earlier build is not left where it would be loaded, and every test is registered.
file(WRITE "${libraries}/libtessera_nccl.so" "")
configure("${EMBEDDING}" embedding -D TESSERA_CUDA=OFF)
if(EXISTS "${libraries}/libtessera_nccl.so")
  message(FATAL_ERROR "TESSERA_CUDA=OFF left ${libraries}/libtessera_nccl.so")
endif()
configure("${TESSERA}" whole -D TESSERA_CUDA=OFF)
execute_process(COMMAND "${CMAKE_CTEST_COMMAND}" --test-dir "${WORK}/whole" -R "^every_test_is_registered$" --no-tests=error
  --output-on-failure
  COMMAND_ERROR_IS_FATAL ANY)
