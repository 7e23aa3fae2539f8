# Installs the build folder BUILD below WORK, then configures, builds and runs the project CONSUMER against what was installed.
cmake_path(SET prefix NORMALIZE "${WORK}/prefix")
cmake_path(SET build NORMALIZE "${WORK}/build")
file(REMOVE_RECURSE "${WORK}")
set(run COMMAND_ERROR_IS_FATAL ANY COMMAND_ECHO STDOUT)
execute_process(COMMAND "${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${prefix}" OUTPUT_QUIET ${run})
execute_process(COMMAND "${CMAKE_COMMAND}" -G Ninja -S "${CONSUMER}" -B "${build}" -D "CMAKE_PREFIX_PATH=${prefix}"
  -D "CMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER}" ${run})
execute_process(COMMAND "${CMAKE_COMMAND}" --build "${build}" ${run})

# What it found must be the installed tree, not the source tree.
file(STRINGS "${build}/CMakeCache.txt" found REGEX "^tessera_DIR")
if(NOT found MATCHES "${prefix}")
  message(FATAL_ERROR "the consumer found another Tessera: ${found}")
endif()
execute_process(COMMAND "${CMAKE_COMMAND}" -E env --unset=LD_LIBRARY_PATH "${build}/consumer" ${run})
